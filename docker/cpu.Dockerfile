# detcompile on CPUs. From the root of the repository:
#     docker build -f docker/cpu.Dockerfile -t detcompile:cpu .
#     docker run --rm -p 127.0.0.1:8000:8000 -v detcompile-cache:/cache detcompile:cpu
#     docker run --rm -v detcompile-cache:/cache detcompile:cpu demo
FROM python:3.12-slim

# detcompile compiles its C++ kernels on the machine that runs them.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*

# For a torch without CUDA (several GB less): --build-arg PIP_EXTRA_ARGS="--extra-index-url <the index of CPU builds>"
ARG PIP_EXTRA_ARGS=""
COPY pyproject.toml README.md LICENSE MANIFEST.in /src/
COPY detcompile /src/detcompile
RUN pip install --no-cache-dir $PIP_EXTRA_ARGS "/src[serve]" && rm -rf /src

# Compiled programs and kernels outlive the container.
RUN useradd --create-home detcompile && mkdir /cache && chown detcompile /cache
USER detcompile
WORKDIR /home/detcompile
ENV DETCOMPILE_CACHE=/cache/detcompile TORCHINDUCTOR_CACHE_DIR=/cache/inductor HF_HOME=/cache/huggingface
VOLUME /cache

EXPOSE 8000
HEALTHCHECK --start-period=300s CMD python -c "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/ready')"
ENTRYPOINT ["detcompile"]
# This server accepts requests without a key: publish the port on 127.0.0.1 only. With `serve MODEL --host 0.0.0.0
# --api-keys FILE`, /ready needs a key too, so the health check would fail: add --no-healthcheck to `docker run`.
CMD ["serve", "tiny", "--host", "0.0.0.0", "--insecure"]
