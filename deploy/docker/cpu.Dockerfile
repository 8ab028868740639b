# syntax=docker/dockerfile:1
# One image with everything, on CPUs: engine, trainer, servers, embedded log server, examples.
#
#   docker build -f deploy/docker/cpu.Dockerfile -t segue:cpu .
#   docker run --rm --shm-size 2g -v segue-runs:/segue/runs segue:cpu train --config examples/first_words/run.toml
FROM python:3.12-slim-bookworm

# A C compiler for the one dependency that exists as source only (pycosat, by way of reasoning-gym); libgomp for torch.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libgomp1 make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /segue
# The packages change less often than the code: they are a layer of their own.
COPY pyproject.toml uv.lock .python-version README.md LICENSE ./
RUN python -m pip install --no-cache-dir "uv>=0.9" \
    && UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never uv sync --frozen --no-install-project --compile-bytecode \
        --extra engine --extra train --group examples --no-cache
COPY . .
RUN UV_PYTHON_DOWNLOADS=never uv sync --frozen --compile-bytecode --extra engine --extra train --group examples --no-cache

# Runs, logs and checkpoints; model folders that the examples make.
VOLUME ["/segue/runs", "/segue/.cache"]
STOPSIGNAL SIGINT
ENTRYPOINT [".venv/bin/segue"]
CMD ["--help"]
