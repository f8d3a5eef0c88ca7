"""The chart's archive renders as the chart of the repository does. It needs only helm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import yaml

from api_server.test_chart_values import CHART, helm
from release.chart import build_chart
from release.source import REPOSITORY, Source, read_version


def test_the_archive_renders_as_the_chart_of_the_repository(tmp_path: Path) -> None:
    source = Source(REPOSITORY, read_version(), "c", 1_700_000_000, changed=False)
    archive = build_chart(source, tmp_path)
    line = ("-n", "place", "--kube-version", "1.34.0", "--set", "metrics.dashboards.enabled=true")
    of_archive, of_folder = (helm("template", "r", str(chart), *line) for chart in (archive, CHART))
    assert (of_archive.returncode, of_archive.stdout) == (0, of_folder.stdout), of_archive.stderr
    assert "0 chart(s) failed" in helm("lint", "--strict", str(archive)).stdout
    newer = build_chart(replace(source, version="9.8.7rc1"), tmp_path)
    assert newer.name == "elasticjob-chart-9.8.7-rc1.tgz"
    shown = yaml.safe_load(helm("show", "chart", str(newer)).stdout)
    assert (shown["version"], shown["appVersion"]) == ("9.8.7-rc1", "9.8.7rc1")
