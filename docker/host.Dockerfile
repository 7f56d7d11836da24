# edgevlm on the CPU, any machine: docker build -f docker/host.Dockerfile -t edgevlm:host .
#   docker run --rm edgevlm:host demo
#   docker run --rm -v "$PWD/bundles:/bundles" edgevlm:host run /bundles/NAME "question"
FROM python:3.12-slim-bookworm

COPY . /src
RUN pip install --no-cache-dir '/src[host,build]' \
    && rm -rf /src \
    && useradd --create-home --uid 1000 edgevlm

USER 1000
WORKDIR /home/edgevlm
ENTRYPOINT ["edgevlm"]
CMD ["doctor"]
