# CPU: docker build -t lm-runner .
# GPU: docker build -t lm-runner --build-arg BASE=nvidia/cuda:12.8.0-runtime-ubuntu24.04 --build-arg TORCH_INDEX=https://pypi.org/simple .
# Any command: docker run --rm -it --user "$(id -u):$(id -g)" -v "$PWD:/work" lm-runner train stage=sft    (GPU: --gpus all)
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=serve
# a C++ compiler builds the kernels of long runs, and those of a GPU
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ $(command -v python3 > /dev/null || echo python3-dev python3-venv) \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp USER=lm-runner
COPY requirements.lock /src/
# a wheel of the CPU index has a higher version than that of PyPI: no package of CUDA is installed
RUN pip install --no-cache-dir --constraint /src/requirements.lock --extra-index-url "$TORCH_INDEX" torch
COPY . /src
RUN pip install --no-cache-dir --constraint /src/requirements.lock "/src${EXTRAS:+[$EXTRAS]}"
WORKDIR /work
RUN chmod 1777 /work
USER 1000:1000
ENTRYPOINT ["python", "-m", "lm_runner"]
CMD ["train", "--help"]
