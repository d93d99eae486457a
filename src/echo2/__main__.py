"""`python -m echo2 COMMAND ...`, which is what `torchrun -m echo2 learner` runs."""

from echo2.cli import main

if __name__ == "__main__":
    main()
