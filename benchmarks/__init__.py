"""Measures the public API of `compressor` and `serving`; nothing imports it.

python -m benchmarks compare --run runs/sst2 --repository model_repository
python -m benchmarks scale --run runs/sst2 --repository model_repository
locust -f benchmarks/locustfile.py --headless -u 16 -t 30s
"""
