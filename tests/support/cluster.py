"""A Kubernetes cluster for one Helm release: its containers run as processes of this machine.

A container's command, variables and files are those of the rendered manifests, which Kubernetes'
schemas have accepted.  Only paths and addresses differ: pods share the file system and loopback.
"""

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import yaml

from tests.support.helm import KUBERNETES, NOTES, validate_object
from tests.support.ports import free_port
from tests.support.process import outbox, relay_process

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.support.helm import Helm
    from tests.support.process import Ended, RelayProcess

JOB_MAX_S = 120
_HOOK = "helm.sh/hook"


def objects_of(rendered: Mapping[str, str]) -> list[dict[str, Any]]:
    """The objects that Helm has rendered."""
    manifests = [text for path, text in rendered.items() if not path.endswith(NOTES)]
    return [each for text in manifests for each in yaml.safe_load_all(text) if each]


class Pod:
    """One container with its files, in a directory of its own."""

    def __init__(self, cluster: Cluster, template: Mapping[str, Any], directory: Path) -> None:
        spec = template["spec"]
        (container,) = spec["containers"]
        self.words: list[str] = container["args"]
        self.env = {each["name"]: each["value"] for each in container["env"]}
        self.ports = {each["name"]: free_port() for each in container.get("ports", ())}
        places = {}
        for mount in container["volumeMounts"]:
            (volume,) = [each for each in spec["volumes"] if each["name"] == mount["name"]]
            places[mount["mountPath"]] = str(directory / mount["name"])
            for path, content in cluster.files(volume).items():
                file = directory / mount["name"] / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(content)
        for path, place in places.items():
            self.words = [word.replace(path, place) for word in self.words]
            self.env = {name: value.replace(path, place) for name, value in self.env.items()}
        for port in container.get("ports", ()):
            listens = f"0.0.0.0:{port['containerPort']}"
            assert listens in self.env.values(), f"nothing listens at {port}"
            here = f"127.0.0.1:{self.ports[port['name']]}"
            self.env = {name: here if v == listens else v for name, v in self.env.items()}

    async def run(self, *words: str) -> Ended:
        """Run a command in the container."""
        return await outbox(*words, env=self.env, timeout_s=JOB_MAX_S)


class Cluster:
    """A namespace, with its Secrets and what was installed in it."""

    def __init__(self, directory: Path, rewrites: Mapping[str, str]) -> None:
        self.secrets: dict[str, dict[str, str]] = {}
        self.pods: dict[str, list[Pod]] = {}
        """Those of each Deployment."""
        self.jobs: dict[str, str] = {}
        """The log of each Job that has completed."""
        self.running: dict[str, list[RelayProcess]] = {}
        self.stack = AsyncExitStack()
        self._directory, self._rewrites = directory, rewrites
        self._config_maps: dict[str, dict[str, str]] = {}

    def files(self, volume: Mapping[str, Any]) -> dict[str, str]:
        """The files of a volume by their paths; a missing Secret or key is a KeyError."""
        if "configMap" in volume:
            return self._config_maps[volume["configMap"]["name"]]
        return {
            item["path"]: self.secrets[source["secret"]["name"]][item["key"]]
            for source in volume["projected"]["sources"]
            for item in source["secret"]["items"]
        }

    async def release(
        self, action: str, helm: Helm, values: Mapping[str, Any], **release: str
    ) -> None:
        """Run `helm install`, or `helm upgrade` without replacing pods.

        Args:
            action: install or upgrade.
            release: as `Helm.render` has it.
        """
        rendered = helm.render(values, **release)
        rendered = {path: self._rewritten(text) for path, text in rendered.items()}
        objects = objects_of(rendered)
        for each in objects:
            for version in KUBERNETES:
                validate_object(each, version)
        named = {(each["kind"], each["metadata"]["name"]): each for each in objects}
        self._config_maps |= {
            name: each["data"] for (kind, name), each in named.items() if kind == "ConfigMap"
        }
        jobs = {name: each for (kind, name), each in named.items() if kind == "Job"}
        await self._run_jobs(jobs, f"pre-{action}")
        for (kind, name), each in named.items():
            if kind == "Deployment" and name not in self.pods:
                await self._start(name, each["spec"])
        await self._run_jobs(jobs, f"post-{action}")

    async def _run_jobs(self, jobs: Mapping[str, Any], hook: str) -> None:
        for name, job in jobs.items():
            if hook in job["metadata"]["annotations"][_HOOK].split(","):
                pod = Pod(self, job["spec"]["template"], self._directory / name)
                ended = await pod.run(*pod.words)
                assert ended.code == 0, ended.stderr
                self.jobs[name] = ended.stdout + ended.stderr

    async def _start(self, name: str, deployment: Mapping[str, Any]) -> None:
        self.pods[name], self.running[name] = [], []
        for number in range(deployment["replicas"]):
            directory = self._directory / f"{name}-{number}"
            pod = Pod(self, deployment["template"], directory)
            process = relay_process(
                pod.env, directory / "log", None, *pod.words[1:], name=pod.words[0]
            )
            self.running[name].append(await self.stack.enter_async_context(process))
            self.pods[name].append(pod)

    def _rewritten(self, text: str) -> str:
        for pattern, replacement in self._rewrites.items():
            text = re.sub(pattern, replacement, text)
        return text


def words_after(words: Sequence[str], *expected: str) -> list[str]:
    """The rest of a command line that begins with these words.

    Raises:
        AssertionError: it begins with others.
    """
    assert tuple(words[: len(expected)]) == expected, words
    return list(words[len(expected) :])
