# syntax=docker/dockerfile:1
# One image for all roles: head, worker, router. The command says which (`tandem head`, `tandem node`, `tandem router`).
#
#   docker build -t tandem:0.1.0 .
#
# Build arguments: EXTRAS=[gpu,tracing] adds the GPU kernels' packages; PIP_EXTRA_INDEX_URL names an index of CPU-only torch builds, which make the
# image some GB smaller where no GPU is used.

FROM python:3.11.14-slim-bookworm AS build
ARG EXTRAS="[tracing]"
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/tandem
ENV PATH=/opt/tandem/bin:$PATH
WORKDIR /src
# The dependencies first: they change less often than the code.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN mkdir tandem transfer router controller prefill_worker decode_worker \
    && pip install -c constraints.txt ".${EXTRAS}" \
    && pip uninstall --yes tandem
COPY tandem tandem
COPY transfer transfer
COPY router router
COPY controller controller
COPY prefill_worker prefill_worker
COPY decode_worker decode_worker
RUN pip install --no-deps . && python -m compileall -q /opt/tandem

FROM python:3.11.14-slim-bookworm
# What torch and UCX link with beyond the base image.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 tandem \
    && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin tandem \
    && install -d -o 10001 -g 10001 /var/cache/tandem
COPY --from=build /opt/tandem /opt/tandem
ENV PATH=/opt/tandem/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    TANDEM_HOME=/var/cache/tandem
USER 10001:10001
WORKDIR /tmp
EXPOSE 50051 8000
STOPSIGNAL SIGTERM
ENTRYPOINT ["tandem"]
CMD ["--help"]
