"""``python -m benchmarks.context_parallel``: see command.py, which ranks in processes of their own can import."""

from benchmarks.context_parallel.command import main

if __name__ == "__main__":
    main()
