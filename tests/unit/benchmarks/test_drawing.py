"""The pictures in docs/img are drawn from the present results and scripts."""

from __future__ import annotations

from benchmarks.drawing.pictures import IMAGES, load, pictures
from benchmarks.drawing.recovery import bars


def test_the_pictures_are_those_of_the_results() -> None:
    for name, text in pictures(load()).items():
        assert text.startswith("<svg ")
        assert text.endswith("</svg>\n")
        assert (IMAGES / f"{name}.svg").read_text() == text, "python -m benchmarks.drawing writes it"


def test_each_fault_has_a_bar_for_each_system_that_was_measured() -> None:
    sides = {"ours": {"median": 0.1}, "torchrun as shipped": {"median": None}}
    row = {"row": "worker-killed", "sides": sides}
    peer = {"row": "killed-in-process", "sides": {"ours": {"median": 0.2}, "torchft": {"median": 0.5}}}
    ((fault, measured),) = bars([row, peer])
    assert fault == "a worker is killed"
    assert [(bar.system, bar.seconds) for bar in measured] == [
        ("elasticjob", 0.1), ("elasticjob, in process", 0.2), ("torchft", 0.5), ("torchrun as shipped", None),
    ]  # fmt: skip
