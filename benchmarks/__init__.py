"""What the product costs, each figure beside a baseline measured in the same run. See docs/benchmarks.md."""
