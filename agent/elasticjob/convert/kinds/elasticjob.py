"""Convert an ElasticJob to another version of the API. Pure."""

from __future__ import annotations

from elasticjob._runtime.contract.names import KIND
from elasticjob._runtime.local.manifest.job_schema import find_mistakes
from elasticjob.convert.draft import JobDraft, in_schema_order
from elasticjob.convert.kinds.api_versions import V1ALPHA1, V1BETA1, to_v1alpha1, to_v1beta1, v1beta1_schema
from elasticjob.convert.parts.fields import ConvertError, InputObject, JsonObject, Notes
from elasticjob.convert.parts.shared_fields import note_unknown

ELASTICJOB_VERSIONS = {version.split("/")[1]: version for version in (V1ALPHA1, V1BETA1)}
"""Values of apiVersion by the name of the version."""


def convert_elasticjob(manifest: JsonObject, version: str, notes: Notes) -> JsonObject:
    """Return the manifest in a version of the API: `v1alpha1` or `v1beta1`. ConvertError: a cluster would refuse it.

    The status and what the API server adds to metadata are left out: the result is a manifest to apply.
    """
    given = manifest.get("apiVersion")
    if given not in ELASTICJOB_VERSIONS.values():
        raise ConvertError(f"apiVersion: want {' or '.join(ELASTICJOB_VERSIONS.values())}, got {given!r}")
    fields = InputObject(manifest, "")
    fields.drop("apiVersion", "kind", "status")
    draft = JobDraft(fields.take_object("metadata"), notes)
    spec = fields.take_object("spec").rest()
    note_unknown(fields, notes)
    if given == V1BETA1:
        if mistakes := find_mistakes(v1beta1_schema(), spec):
            raise ConvertError("the spec is not one of v1beta1:\n  " + "\n  ".join(mistakes))
        spec = to_v1alpha1(spec)
    for name, value in spec.items():
        draft.put(name, value)
    job = draft.finish()
    return job if ELASTICJOB_VERSIONS[version] == V1ALPHA1 else in_v1beta1(job)


def in_v1beta1(job: JsonObject) -> JsonObject:
    """Return an ElasticJob of v1alpha1 that a cluster accepts, in v1beta1."""
    spec = in_schema_order(v1beta1_schema(), to_v1beta1(job["spec"]))
    return {"apiVersion": V1BETA1, "kind": KIND, "metadata": job["metadata"], "spec": spec}
