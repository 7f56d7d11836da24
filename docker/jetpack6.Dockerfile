# edgevlm for JetPack 6.1 to 6.2.x (Orin): docker build -f docker/jetpack6.Dockerfile -t edgevlm:jetpack6 .
#   docker run --rm --runtime nvidia -v /etc/nv_tegra_release:/etc/nv_tegra_release:ro \
#     -v /etc/nv_boot_control.conf:/etc/nv_boot_control.conf:ro edgevlm:jetpack6
# The base has CUDA 12.6, TensorRT 10.3 and Python 3.10.
FROM nvcr.io/nvidia/l4t-jetpack:r36.4.0

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && test -d /usr/lib/python3.10/dist-packages/tensorrt

# Through the system's packages the environment sees TensorRT, which pip does not have for JetPack.
COPY . /src
RUN /usr/bin/python3.10 -m venv --system-site-packages /opt/edgevlm \
    && /opt/edgevlm/bin/pip install --no-cache-dir '/src[jetson6]' \
    && rm -rf /src \
    && useradd --create-home --uid 1000 --groups video edgevlm

ENV PATH=/opt/edgevlm/bin:$PATH
USER 1000
WORKDIR /home/edgevlm
ENTRYPOINT ["edgevlm"]
CMD ["doctor"]
