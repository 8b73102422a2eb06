# The image of a PyTorch job: your own, with Signpost's wheel in it. The base needs Debian 12's libraries
# and a Python with PyTorch; `bazel build //client/python:wheel` makes the wheel:
#
#   cp bazel-bin/client/python/signpost-*.whl train.py context/
#   docker build -f deploy/worker.Dockerfile --build-arg BASE=registry.example/torch:2 -t bert:1 context
#
# A base with another interpreter than python3 names it with --build-arg PYTHON=.
ARG BASE
FROM $BASE
ARG PYTHON=python3
USER 0:0
# What libsignpost.so and the program in the wheel load.
RUN apt-get update && \
    apt-get install -y --no-install-recommends libabsl20220623 libgrpc++1.51 libhwy1 libisal2 \
      libmicrohttpd12 libopenblas0-serial libprotobuf32 libyaml-cpp0.7 && \
    rm -rf /var/lib/apt/lists/*
COPY . /job/
RUN PIP_BREAK_SYSTEM_PACKAGES=1 $PYTHON -m pip install --no-index --no-deps /job/signpost-*.whl
WORKDIR /job
USER 65532:65532
