"""Python as in an environment with some packages only, which the variable ONLY_PACKAGES names."""

import os
import sys


class OnlyPackages:
    """Refuses the import of all packages but those, the standard library and `outbox`."""

    packages = frozenset(
        (
            "outbox",
            "orjson",
            "posting",
            *sys.stdlib_module_names,
            *os.environ["ONLY_PACKAGES"].split(","),
        )
    )

    def find_spec(self, name, path=None, target=None):
        """Leave an allowed import to the other finders."""
        package = name.partition(".")[0]
        if package not in self.packages and not package.startswith(("_", "sitecustomize")):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, OnlyPackages())
