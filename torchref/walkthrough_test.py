"""The walkthrough: six parameters on two ranks."""

from torchref.walkthrough import main, walk


def test_holdings_after_each_phase(ranks):
    for rank in (0, 1):
        held = [
            (one.parameters, one.exp_avg, one.exp_avg_sq, one.gradients, one.sent)
            for one in walk(ranks)
            if one.rank == rank
        ]
        assert held == [
            (6, 3, 3, 0, ""),
            (6, 3, 3, 6, "reduce-scatter"),
            (6, 3, 3, 3, ""),
            (6, 3, 3, 3, "all-gather"),
        ]


def test_main_prints_a_line_for_each_phase_and_rank(capsys, monkeypatch, ranks):
    monkeypatch.setattr("torchref.walkthrough.launch", ranks.run)
    main()
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.split() == ["phase", "rank", "parameters", "exp_avg", "exp_avg_sq", "gradients", "sent"]
    assert len(lines) == 4 * 2
    assert lines[2].split() == ["backward", "0", "6", "3", "3", "6", "reduce-scatter"]
