# docker build -t megaclass .                                                              CPU
# docker build -t megaclass --build-arg BASE=nvidia/cuda:13.0.1-runtime-ubuntu24.04 \
#              --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .            CUDA
ARG BASE=ubuntu:24.04
FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_VERSION=2.13.0

# openssh: `megaclass run` between containers. gcc: Triton compiles a small launcher with it on a GPU.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        python3 python3-venv python3-dev gcc libc6-dev openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/* \
    # The packages make host keys, which all containers of the image would share. deploy/sshd.sh makes one per container.
    && rm -f /etc/ssh/ssh_host_*
RUN python3 -m venv /opt/megaclass
ENV PATH=/opt/megaclass/bin:$PATH
RUN pip install --no-cache-dir "torch==${TORCH_VERSION}" --index-url "${TORCH_INDEX}"

COPY packages /src
RUN pip install --no-cache-dir /src/launch /src/horovod "/src/megaclass[ui,onnx]" && rm -rf /src

COPY --chmod=755 deploy/sshd.sh /usr/local/bin/megaclass-sshd

# Not root: what a run writes belongs to an ordinary user.
RUN useradd --create-home --uid 1001 trainer
USER 1001
WORKDIR /home/trainer
ENTRYPOINT ["megaclass"]
CMD ["--help"]
