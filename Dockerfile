# docker build -t lm-runner . && docker run --rm -it -v "$PWD/outputs:/app/outputs" lm-runner stage=pretrain
# GPU: docker build --build-arg BASE=nvidia/cuda:12.8.0-runtime-ubuntu24.04 ..., docker run --gpus all ... precision=bf16
ARG BASE=python:3.12-slim
FROM ${BASE}
RUN if ! command -v python3 >/dev/null || ! python3 -m venv --help >/dev/null 2>&1; then \
        apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*; fi
WORKDIR /app
RUN python3 -m venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY lm_runner lm_runner
COPY common common
COPY conf conf
COPY data data
COPY hydra_plugins hydra_plugins
COPY models models
COPY runner runner
RUN pip install --no-cache-dir --constraint requirements.lock --editable .
ENTRYPOINT ["python", "runner/train.py"]
