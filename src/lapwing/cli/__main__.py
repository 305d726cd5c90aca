"""`python -m lapwing.cli`, the same as `lapwing`; what torchrun starts."""

from lapwing.cli import main

if __name__ == "__main__":
    main()
