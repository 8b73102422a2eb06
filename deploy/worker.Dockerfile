# The image of a PyTorch job: your own base, which has PyTorch from 2.6 on, with Signpost's wheel in it.
#
#   cp dist/signpost-*.whl train.py context/
#   docker build -f deploy/worker.Dockerfile --build-arg BASE=pytorch/pytorch:latest -t bert:1 context
ARG BASE
FROM $BASE
COPY . /job/
RUN pip install --no-index /job/signpost-*.whl
WORKDIR /job
USER 65532:65532
