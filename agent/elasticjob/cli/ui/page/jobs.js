// All jobs as a table.

import { el } from "./dom.js";
import { ago, number } from "./format.js";
import { badge, table } from "./parts.js";

export function jobsPage(view) {
  const everywhere = view.namespace === null;
  const title = el("h1", { tabindex: "-1", id: "title" }, everywhere ? "Jobs of all namespaces" : `Jobs of namespace ${view.namespace}`);
  if (!view.jobs.length) return [title, el("p", {}, "There are no ElasticJobs here.")];
  const columns = [...(everywhere ? ["Job", "Namespace"] : ["Job"]), "Phase", "Pods", "Workers", "Restarts", "Progress", "Goodput", "Created"];
  const first = everywhere ? 3 : 2;
  const rows = view.jobs.map((job) => ({
    key: `${job.namespace}/${job.name}`,
    cells: [
      el("a", { href: jobHref(job) }, job.name), ...(everywhere ? [job.namespace] : []), badge(job.phase),
      `${job.training} of ${job.wanted}`, job.worldSize, job.restarts,
      job.progressPercentage === undefined ? "-" : `${job.progressPercentage}%`,
      job.goodputPercent === undefined ? "-" : `${number(job.goodputPercent)}%`, ago(job.created, view.now),
    ],
  }));
  return [title, table("Jobs", columns, rows, [first, first + 1, first + 2, first + 3, first + 4])];
}

export function jobHref(job) {
  return `#/${encodeURIComponent(job.namespace ?? "")}/${encodeURIComponent(job.name)}`;
}
