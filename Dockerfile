# The elasticjob image (operator, store, agent). Build it with: docker build -t elasticjob:0.1.0 .
# `make images` builds the same image without Docker.
ARG PYTHON=python:3.13-slim-trixie
FROM ${PYTHON} AS build
RUN pip install --no-cache-dir 'uv>=0.5'
WORKDIR /src
COPY pyproject.toml README.md ./
COPY agent agent
COPY operator operator
COPY requirements requirements
RUN uv venv /opt/venv \
    && uv pip install --python /opt/venv/bin/python --compile-bytecode --require-hashes -r requirements/operator.lock \
    && uv pip install --python /opt/venv/bin/python --compile-bytecode --no-deps .
RUN mkdir -p /opt/elasticjob /tmp/agent \
    && cp -r agent/elasticjob /tmp/agent/ \
    && find /tmp/agent -name __pycache__ -prune -exec rm -r {} + \
    && printf 'import sys\n\nfrom elasticjob.cli import main\n\nsys.exit(main())\n' > /tmp/agent/__main__.py \
    && python3 -m zipapp /tmp/agent -o /opt/elasticjob/agent.pyz

FROM ${PYTHON}
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/elasticjob /opt/elasticjob
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
CMD ["elasticjob-operator"]
