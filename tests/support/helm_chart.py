"""Runs Helm as a library: reads a request as JSON from stdin, writes the result to stdout.

A process of its own, so that the Go runtime of the library stays out of the tests' process.
"""

import json
import sys

from helm_python import chart
from helm_python.errors import HelmError

request = json.load(sys.stdin)
path, values = request["chart"], request["values"]
if request["action"] == "lint":
    result = chart.lint(path, values, strict=True)
else:
    loaded = chart.Chart.load(path)
    try:
        loaded.validate_schema(values)
        result = {
            "rendered": loaded.render(
                values, name=request["release"], namespace=request["namespace"]
            )
        }
    except HelmError as error:
        result = {"error": str(error)}
json.dump(result, sys.stdout)
