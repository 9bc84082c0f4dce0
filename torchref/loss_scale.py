"""Dynamic loss scaling: float16 has no numbers below 6e-8, so gradients are computed of a loss times ``scale``.

The twin of ``jaxddp/training/loss_scale.py``. It looks at the loss and the norm of the averaged gradient, which all
ranks have, sharded or not. So ranks skip the same steps; ``torch.amp.GradScaler`` looks at this rank's gradients alone.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000


@dataclass
class LossScale:
    """What the loss is multiplied by, a power of two, and the finite steps since that changed."""

    scale: float = FIRST_SCALE
    num_finite: int = 0

    def update(self, is_finite: bool) -> None:
        """Halves the scale after a step that is not finite, to 1 at least; doubles it after ``GROWTH_STEPS`` others."""
        self.num_finite = self.num_finite + 1 if is_finite else 0
        if not is_finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self.num_finite >= GROWTH_STEPS:
            self.scale, self.num_finite = self.scale * 2, 0
