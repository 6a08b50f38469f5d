# One image for every process of Memora; the command decides which one runs.
FROM python:3.13-slim AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python -m venv /opt/memora
COPY pyproject.toml README.md LICENSE ./
COPY memora ./memora
COPY workers ./workers
RUN /opt/memora/bin/pip install .

FROM python:3.13-slim
RUN useradd --create-home --uid 10001 memora
COPY --from=build /opt/memora /opt/memora
ENV PATH="/opt/memora/bin:$PATH" PYTHONUNBUFFERED=1 MEMORA_DATA_DIR=/home/memora/data
USER 10001
WORKDIR /home/memora
ENTRYPOINT ["memora"]
CMD ["--help"]
