"""A package, so that `tests.tools` is ours: some site-packages bring a package `tests` along."""
