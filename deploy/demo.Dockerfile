# A tiny model on the CPU, observed: something to look at.
FROM python:3.12.11-slim-bookworm
WORKDIR /src
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends gcc g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*
COPY requirements ./requirements
RUN pip install --no-cache-dir --requirement requirements/torch.txt --index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-cache-dir --requirement requirements/vllm.txt
COPY . .
RUN pip install --no-cache-dir --requirement requirements/dev.txt '.[otel]' && useradd --create-home demo
USER demo
CMD ["python", "-m", "demo"]
