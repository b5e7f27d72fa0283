"""`python -m mula_ray`."""

from mula_ray.cli.main import run

if __name__ == "__main__":
    run()
