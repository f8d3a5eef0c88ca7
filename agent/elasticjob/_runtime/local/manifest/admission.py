"""Check a manifest as the chart's ValidatingAdmissionPolicy does, in its words. Pure."""

from __future__ import annotations

from typing import Any

from elasticjob._runtime.contract.commands.reserved_variables import is_reserved_variable


def find_reserved_variables(manifest: Any) -> list[str]:
    """Return why the policy refuses this ElasticJob, whose types are right; empty if it does not."""
    pod = manifest["spec"]["template"]["spec"]
    containers = [*pod["containers"], *pod.get("initContainers", ())]
    names = [item["name"] for container in containers for item in container.get("env", ())]
    refused = [name for name in names if is_reserved_variable(name)]
    if not refused:
        return []
    them = "it" if len(refused) == 1 else "them"
    return [f"remove {', '.join(refused)} from env in spec.template: elasticjob sets {them} for each worker"]
