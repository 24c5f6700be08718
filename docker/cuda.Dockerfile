# detcompile on NVIDIA GPUs (the host needs its driver and the NVIDIA Container Toolkit). From the root of the repository:
#     docker build -f docker/cuda.Dockerfile -t detcompile:cuda .
#     docker run --rm --gpus all --ipc=host -p 127.0.0.1:8000:8000 -v detcompile-cache:/cache detcompile:cuda
#     docker run --rm --gpus all --ipc=host -v detcompile-cache:/cache detcompile:cuda demo
FROM python:3.12-slim

# The wheels of torch and triton bring CUDA's libraries and ptxas; launchers of kernels are compiled with g++.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml README.md LICENSE MANIFEST.in /src/
COPY detcompile /src/detcompile
RUN pip install --no-cache-dir "/src[serve]" && rm -rf /src

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
