# Every command a person needs. `make help` lists them.
SHELL := /bin/bash -o pipefail
.DEFAULT_GOAL := help
.PHONY: help
# Byte code is what makes the second import of torch fast.
unexport PYTHONDONTWRITEBYTECODE
PY := .venv/bin/python
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# The cluster's Kubernetes, else the newest: `make e2e KUBERNETES=1.34` (docs/contribute/cluster.md).
export ELASTICJOB_KUBERNETES := $(or $(KUBERNETES),$(ELASTICJOB_KUBERNETES))
# Tests marked `deep` repeat at length what shorter ones show: `make deep` runs them, MARKED= runs all.
MARKED := not deep
SELECTED = ($(or $(MARKED),deep or not deep))
PYTEST = pytest -q -m '$(SELECTED)'

help: ## list the commands
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 18

.venv/.stamp: pyproject.toml
	@echo "[venv] Python packages (torch is the large one) ..."
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "python3 must be 3.11 or newer" >&2; exit 1; }
	@test -x $(PY) || python3 -m venv .venv
	@.venv/bin/pip install -q --disable-pip-version-check 'uv>=0.5'
	@.venv/bin/uv pip install -q --python $(PY) -e '.[operator,torch,cli,test,docs]'
	@touch $@

.PHONY: venv
venv: .venv/.stamp ## Python environment for tests and local runs (.venv)

.PHONY: lint
lint: venv ## ruff, mypy --strict, import contracts, spelling
	@ruff check --no-cache . && ruff format --no-cache --check . && codespell && mypy && lint-imports && $(PY) .ci/reasons.py --check

.PHONY: docs
docs: venv ## the documentation as a site, in .cache/site (SERVE=1: on http://127.0.0.1:8000, built again at each change)
	@NO_MKDOCS_2_WARNING=1 mkdocs $(if $(SERVE),serve,build -q) -f .ci/site.yml
	@$(if $(SERVE),,echo .cache/site/index.html)

.PHONY: docs-version
docs-version: venv ## the site of a version, beside the earlier ones, as a commit on the branch gh-pages (VERSION=0.2)
	@test -n "$(VERSION)" || { echo "usage: make docs-version VERSION=0.2" >&2; exit 64; }
	@NO_MKDOCS_2_WARNING=1 mike deploy --config-file .ci/site.yml --update-aliases $(VERSION) latest
	@NO_MKDOCS_2_WARNING=1 mike set-default --config-file .ci/site.yml latest

.PHONY: unit
unit: venv ## tests without cluster, torch or jobs of real processes (a minute on two cores)
	@pytest -q -m '$(SELECTED) and not slow' -n auto --dist worksteal tests/unit tests/compat

.PHONY: unit-slow
unit-slow: venv ## those of them that take half a second or more each
	@pytest -q -m '$(SELECTED) and slow' -n auto --dist worksteal tests/unit tests/compat

.PHONY: model
model: venv ## the whole explorer: interleavings of the pure decisions (six minutes on two cores; SAMPLE=1: each test with one of twenty rows)
	@$(PYTEST) -n auto --dist worksteal --timeout 1800 tests/model $(if $(SAMPLE),--sample)

.PHONY: programs
programs: ## build what the cluster runs, once (12 minutes on two cores)
	@python3 tests/cluster/cluster.py prepare

.PHONY: cluster
cluster: ## a real three-node Kubernetes on this machine
	@python3 tests/cluster/cluster.py up

.PHONY: cluster-down
cluster-down: ## stop it and remove all it made
	@python3 tests/cluster/cluster.py down

.PHONY: images
images: venv ## both images as OCI archives under .cache/images, without Docker
	@$(PY) tests/images/build.py

.PHONY: reasons
reasons: venv ## generate what `elasticjob explain` says, from the tables of the documentation
	@$(PY) .ci/reasons.py

.PHONY: crds
crds: venv ## generate crds/elasticjobs.yaml, the chart's copy of it, and the pages of its fields and of the chart's values
	@$(PY) crds/generate.py "$$(cd tests/cluster/tools/kubernetes_1_34 && go mod download k8s.io/kubernetes && go list -m -f '{{.Dir}}' k8s.io/kubernetes)/api/openapi-spec/swagger.json"
	@$(PY) crds/reference_pages.py

.PHONY: integration
integration: venv ## torch as our peer, and real processes on this machine; a GPU, where there is one
	@$(PYTEST) -n 2 --dist worksteal tests/with_torch tests/conformance tests/integration tests/gpu --ignore tests/integration/test_cluster.py

.PHONY: cluster-test
cluster-test: venv cluster ## the cluster itself: its verbs, and that it leaves nothing behind
	@$(PYTEST) tests/integration/test_cluster.py

.PHONY: operator-test
operator-test: venv programs ## the operator on a real API server, with simulated pods
	@$(PYTEST) tests/api_server

.PHONY: metrics-server
metrics-server: ## build metrics-server, for the test of an autoscaler, once (3 minutes on two cores)
	@python3 tests/cluster/cluster.py metrics-server

.PHONY: kueue
kueue: ## build Kueue, for the tests of queues, once (5 minutes on two cores)
	@python3 tests/cluster/cluster.py kueue

.PHONY: alerts
alerts: venv ## test the chart's alerts with promtool, which it builds once (5 minutes on two cores)
	@python3 tests/cluster/cluster.py monitoring >/dev/null
	@pytest -q tests/unit/test_monitoring.py

.PHONY: monitoring
monitoring: venv cluster images ## a killed worker on the cluster, seen by a real Prometheus (PICTURE=file.png draws its dashboard; not part of `make test`)
	@python3 tests/cluster/cluster.py monitoring >/dev/null
	@pytest -q -s tests/monitoring

.PHONY: dashboards
dashboards: ## write the Grafana dashboards of the chart
	@python3 charts/dashboards.py

.PHONY: e2e
e2e: venv cluster images metrics-server kueue ## everything, on the real cluster (it stays up afterwards)
	@pytest -q -n 2 --maxschedchunk 1 -m '$(SELECTED) and not alone' tests/e2e; first=$$?; \
		pytest -q -m '$(SELECTED) and alone' tests/e2e && exit $$first

.PHONY: e2e-oldest
e2e-oldest: export ELASTICJOB_KUBERNETES = 1.34
e2e-oldest: venv cluster images metrics-server kueue ## one test of each end-to-end file on the oldest Kubernetes that we claim (not part of `make test`; `make cluster-down` first)
	@pytest -q -m 'not deep' --one-of-each-file tests/e2e

.PHONY: network-policies
network-policies: venv cluster images ## faults on the real cluster while NetworkPolicies are enforced (20 minutes; not part of `make test`)
	@pytest -q tests/network_policies; result=$$?; PYTHONPATH=tests $(PY) -m network_policies.enforcer; exit $$result

.PHONY: test
test: ## what CI runs, fast tests first; those on the cluster run beside the others (`make deep` has the rest)
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory unit
	@$(MAKE) --no-print-directory -j2 programs images
	@.ci/beside 'nice -n 19 $(MAKE) --no-print-directory model SAMPLE=1' '$(MAKE) --no-print-directory slow-tests'

.PHONY: slow-tests slowest-tests
slow-tests:
	@$(MAKE) --no-print-directory cluster-test
	@$(MAKE) --no-print-directory metrics-server kueue
	@.ci/beside '$(MAKE) --no-print-directory unit-slow operator-test' '$(MAKE) --no-print-directory slowest-tests'
slowest-tests:
	@.ci/beside '$(MAKE) --no-print-directory integration' '$(MAKE) --no-print-directory e2e'

.PHONY: deep
deep: ## the tests that `make test` leaves out: the whole explorer, all examples of property tests, and those marked `deep`
	@pytest -q -n auto --dist worksteal -m hypothesis --hypothesis-profile deep tests/unit tests/with_torch
	@$(MAKE) --no-print-directory model
	@$(MAKE) --no-print-directory integration MARKED=deep
	@$(MAKE) --no-print-directory e2e MARKED=deep

.PHONY: release
release: venv ## build a release into dist/: packages, chart, image, bill of materials, checksums, provenance (ARGS='--no-image')
	@PYTHONPATH=.ci $(PY) -m release $(ARGS)

.PHONY: version
version: venv ## print the version; VERSION=0.2.0 writes another one to all places
	@PYTHONPATH=.ci $(PY) -m release.version $(VERSION)

.PHONY: locks
locks: venv ## lock again what the image and the command line install (requirements/*.lock)
	@for lock in operator:3.11 cli:3.10; do uv pip compile -q --upgrade pyproject.toml --extra $${lock%%:*} --universal \
		--generate-hashes --python-version $${lock#*:} --no-header --no-annotate -o requirements/$${lock%%:*}.lock || exit; done

.PHONY: demo
demo: ## a cluster, a plain job, one in process, and everything taken away while they train
	@$(MAKE) --no-print-directory -j2 venv programs $(if $(filter 0,$(shell id -u)),images)
	@$(PY) examples/demo/demo.py

.PHONY: demo-queues
demo-queues: ## two elastic jobs share the quota of the real Kueue, and give pods up without a stop (needs root)
	@$(MAKE) --no-print-directory -j2 venv programs images
	@$(MAKE) --no-print-directory kueue >/dev/null
	@$(PY) examples/demo/queues.py

.PHONY: mutants
mutants: venv ## does the explorer find bugs put in on purpose? writes tests/MUTANTS.md (hours)
	@PYTHONPATH=tests:agent:operator $(PY) -m model.mutation --write

.PHONY: bench
bench: venv ## ours against stock torchrun on this machine: docs/contribute/benchmarks.md (ROWS=name,... REPEAT=n; an hour and a quarter)
	@$(PY) -m benchmarks $(if $(ROWS),--rows $(ROWS)) $(if $(REPEAT),--repeat $(REPEAT))

.PHONY: gpu
gpu: ## tests, exact weights and rows on one GPU, with the torch of this machine (CPU=1: a rehearsal; ROWS, MINUTES, RESULTS, PAGE)
	@PYTHONPATH=.:agent:$$PYTHONPATH python3 -m benchmarks.gpu $(if $(CPU),--cpu) $(if $(ROWS),--rows $(ROWS)) \
		$(if $(MINUTES),--minutes $(MINUTES)) $(if $(RESULTS),--results $(RESULTS)) $(if $(PAGE),--page $(PAGE))

.PHONY: peers
peers: venv ## other libraries that the in-process rows of `make bench` measure too, where they install (.cache/peers)
	@torch=$$($(PY) -c 'import importlib.metadata as m; print(m.version("torch").partition("+")[0])'); failed=0; \
	for peer in nvidia:nvidia-resiliency-ext torchft:torchft-nightly; do \
		folder=.cache/peers/$${peer%%:*}; echo "[peers] $${peer#*:} with torch $$torch in $$folder ..."; \
		uv venv -q --allow-existing --python $(PY) $$folder \
			&& uv pip install -q --python $$folder/bin/python torch==$$torch $${peer#*:} || failed=1; \
	done; exit $$failed

.PHONY: bench-rows
bench-rows: venv ## the rows of `make bench`, and how long each takes
	@$(PY) -m benchmarks --list

.PHONY: bench-cluster
bench-cluster: venv cluster ## the rows that need the real cluster (ROWS=name,... REPEAT=n)
	@PYTHONPATH=tests $(PY) -m benchmarks.in_cluster $(if $(ROWS),--rows $(ROWS)) $(if $(REPEAT),--repeat $(REPEAT))

.PHONY: bench-cluster-submit
bench-cluster-submit: venv cluster ## submit and edit to the first step, on the real cluster
	@PYTHONPATH=tests $(PY) -m benchmarks.submit

.PHONY: bench-cluster-queues
bench-cluster-queues: venv cluster images kueue ## a job gives pods to a more urgent one, in a queue of the real Kueue
	@PYTHONPATH=tests $(PY) -m benchmarks.queues

.PHONY: bench-operator
bench-operator: venv ## the operator at a thousand jobs, on a real API server with simulated pods (JOBS=1000, ROWS=name,...)
	@PYTHONPATH=tests $(PY) -m benchmarks.operator_scale --jobs $(or $(JOBS),1000) $(if $(ROWS),--rows $(ROWS))

.PHONY: operator-peer
operator-peer: venv ## build Kubeflow's training-operator, which `make bench-operator` measures too, once (3 minutes on two cores)
	@PYTHONPATH=tests $(PY) -m benchmarks.operator_peer

.PHONY: soak
soak: venv ## one fault a minute of every kind on the cluster (MINUTES=20 EVERY=60 SEED=1; LOCAL=1: without it; IN_PROCESS=1; ONLY='worker killed'); ROUNDS=20000: fast rounds, what grows?
ifdef ROUNDS
	@$(PY) -m benchmarks.many_rounds --rounds $(ROUNDS) $(if $(FIRST),--first $(FIRST)) $(if $(NODES),--nodes $(NODES)) \
		$(if $(WORKERS),--workers $(WORKERS))
else
	@PYTHONPATH=tests $(PY) -m benchmarks.soak --minutes $(or $(MINUTES),20) --every $(or $(EVERY),60) \
		--seed $(or $(SEED),1) $(if $(LOCAL),--local) $(if $(IN_PROCESS),--in-process) $(if $(ONLY),--only '$(ONLY)')
endif

.PHONY: fuzz
fuzz: venv ## changed inputs for all that reads what others write; writes a table to docs/operate/security.md (MINUTES=9 SEED=1)
	@PYTHONPATH=tests:agent $(PY) -m fuzz --minutes $(or $(MINUTES),9) --seed $(or $(SEED),1)

.PHONY: yields
yields: venv cluster images ## a job on the cluster yields to a pod of higher priority and grows back (CYCLES=100)
	@CYCLES=$(or $(CYCLES),100) pytest -q -s tests/e2e/test_planned.py -k yields

.PHONY: faults
faults: venv ## random faults in a job with in-process restart, compared with a single process (FAULTS=200 SEED=1 SPARES=1 QUEUED=1)
	@PYTHONPATH=tests $(PY) -m benchmarks.faults --faults $(or $(FAULTS),200) --seed $(or $(SEED),1) \
		$(if $(SPARES),--spare-processes) $(if $(QUEUED),--queued-device)
