# The image of a PyTorch job: a base of yours that has PyTorch 2.6 or newer, plus Signpost's wheel.
#
#   cp dist/signpost-*.whl train.py context/
#   docker build -f deploy/worker.Dockerfile --build-arg BASE=pytorch/pytorch:latest -t bert:1 context
ARG BASE
FROM $BASE
COPY . /job/
RUN pip install --no-index /job/signpost-*.whl
WORKDIR /job
USER 65532:65532
