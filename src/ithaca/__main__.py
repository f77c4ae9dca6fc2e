"""`python -m ithaca` does what `ithaca` does."""

from ithaca.cli import main

if __name__ == "__main__":
    main()
