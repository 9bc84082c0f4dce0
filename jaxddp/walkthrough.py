"""``python -m jaxddp.walkthrough``: prints what two ranks hold under ZeRO, phase by phase."""

from .inspection.walkthrough import main

if __name__ == "__main__":
    main()
