# docker build -t jaxpipe .                          for CPUs
# docker build -t jaxpipe --build-arg EXTRA=cuda13 . for GPUs; run it with --gpus all
FROM python:3.12-slim
ARG EXTRA=""
# launch reaches other hosts by ssh
RUN apt-get update && apt-get install -y --no-install-recommends openssh-client && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/jaxpipe
COPY pyproject.toml README.md LICENSE ./
COPY jaxpipe jaxpipe
RUN pip install --no-cache-dir ".${EXTRA:+[$EXTRA]}"
WORKDIR /work
COPY examples examples
ENTRYPOINT ["jaxpipe"]
CMD ["--help"]
