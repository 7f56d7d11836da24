# edgevlm for JetPack 7.2 (Orin, Thor): docker build -f docker/jetpack7.Dockerfile -t edgevlm:jetpack7 .
#   docker run --rm --runtime nvidia -v /etc/nv_tegra_release:/etc/nv_tegra_release:ro \
#     -v /etc/nv_boot_control.conf:/etc/nv_boot_control.conf:ro edgevlm:jetpack7
# No igpu image: those hold JetPack 6 libraries that want libnvdla_compiler.so, which L4T 39 lacks.
FROM ubuntu:24.04

# Engines are tied to the release: it must be the TensorRT that the board has.
ARG TENSORRT=10.16.2.10-1+cuda13.2
ARG L4T=r39.2
ARG KEY=3C6D1FF3100C8C3ABB0869C0E6543461A9996195

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates curl gnupg python3 python3-venv \
    && curl -fsSL https://repo.download.nvidia.com/jetson/jetson-ota-public.asc -o /tmp/key.asc \
    && gpg --show-keys --with-colons /tmp/key.asc | grep -q "^fpr:::::::::$KEY:" \
    && gpg --dearmor -o /usr/share/keyrings/nvidia-jetson.gpg /tmp/key.asc \
    && echo "deb [signed-by=/usr/share/keyrings/nvidia-jetson.gpg] https://repo.download.nvidia.com/jetson/common $L4T main" \
       > /etc/apt/sources.list.d/nvidia-jetson.list \
    && apt-get update \
    && apt-get install -y --no-install-recommends \
       "libnvinfer10=$TENSORRT" \
       "libnvinfer-plugin10=$TENSORRT" \
       "libnvonnxparsers10=$TENSORRT" \
       "python3-libnvinfer=$TENSORRT" \
    && apt-get purge -y --auto-remove curl gnupg \
    && rm -rf /var/lib/apt/lists/* /tmp/key.asc /root/.gnupg \
    && test -d /usr/lib/python3.12/dist-packages/tensorrt

# Through the system's packages the environment sees TensorRT; PyPI's newest is 11, not for JetPack.
# Ubuntu's image has a user 1000 of its own.
COPY . /src
RUN /usr/bin/python3.12 -m venv --system-site-packages /opt/edgevlm \
    && /opt/edgevlm/bin/pip install --no-cache-dir '/src[jetson7]' \
    && rm -rf /src \
    && userdel --remove ubuntu \
    && useradd --create-home --uid 1000 --groups video edgevlm

ENV PATH=/opt/edgevlm/bin:$PATH
USER 1000
WORKDIR /home/edgevlm
ENTRYPOINT ["edgevlm"]
CMD ["doctor"]
