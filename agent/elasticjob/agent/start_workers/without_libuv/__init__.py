"""Put on PYTHONPATH as a folder: see `sitecustomize`."""
