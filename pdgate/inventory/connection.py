"""How a host is reached: one description, from which testinfra's host spec, the ssh_config and our own argv are made."""

from __future__ import annotations

import shlex
from typing import Any, Literal
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field

Kind = Literal["ssh", "docker", "podman", "kubectl", "local"]

KINDS: dict[str, Kind] = {
    "ssh": "ssh", "smart": "ssh", "paramiko": "ssh", "paramiko_ssh": "ssh", "ansible.builtin.ssh": "ssh",
    "ansible.builtin.paramiko_ssh": "ssh", "local": "local", "ansible.builtin.local": "local",
    "docker": "docker", "community.docker.docker": "docker", "community.docker.docker_api": "docker",
    "podman": "podman", "containers.podman.podman": "podman",
    "kubectl": "kubectl", "kubernetes.core.kubectl": "kubectl", "community.kubernetes.kubectl": "kubectl",
}  # fmt: skip


class Connection(BaseModel):
    """A connection as the inventory's plain Ansible variables describe it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    name: str = Field(description="ssh alias (the inventory name), container, or pod")
    user: str | None = None
    become: bool = False
    become_user: str | None = None
    ssh_options: list[tuple[str, str]] = Field(default_factory=list, description="ssh_config keywords, in order")
    namespace: str | None = None
    container: str | None = None
    context: str | None = None
    kubeconfig: str | None = None

    def testinfra_spec(self, ssh_config: str) -> str:
        """The host spec testinfra's `--hosts` takes; `ssh_config` is the file `ssh_config_text` was written to."""
        query: dict[str, str] = {}
        if self.become:
            query["sudo"] = "true"
            if self.become_user:
                query["sudo_user"] = self.become_user
        if self.kind == "local":
            name = ""
        elif self.kind == "ssh":
            name = quote(self.name, safe="")
            query["ssh_config"] = ssh_config
            query["controlpersist"] = "0"  # the config file itself multiplexes, with a ControlPath
        elif self.kind == "kubectl":
            name = self.name
            for key in ("namespace", "container", "context", "kubeconfig"):
                if getattr(self, key):
                    query[key] = getattr(self, key)
        else:
            name = f"{self.user}@{self.name}" if self.user else self.name
        pairs = "&".join(f"{key}={quote(value, safe='/')}" for key, value in query.items())
        return f"{self.kind}://{name}" + (f"?{pairs}" if pairs else "")

    def shell_argv(self, ssh_config: str) -> list[str]:
        """Local argv that runs a POSIX shell on the host, reading its script from stdin."""
        shell = "sh -s"
        if self.become:
            shell = f"sudo -n {f'-u {shlex.quote(self.become_user)} ' if self.become_user else ''}sh -s"
        if self.kind == "local":
            return shlex.split(shell)
        if self.kind == "ssh":
            return ["ssh", "-F", ssh_config, "-T", self.name, shell]
        if self.kind == "kubectl":
            argv = ["kubectl"]
            if self.kubeconfig:
                argv.append(f"--kubeconfig={self.kubeconfig}")
            if self.context:
                argv.append(f"--context={self.context}")
            if self.namespace:
                argv += ["-n", self.namespace]
            argv += ["exec", "-i", self.name]
            if self.container:
                argv += ["-c", self.container]
            return [*argv, "--", *shlex.split(shell)]
        user = ["-u", self.user] if self.user else []
        return [self.kind, "exec", "-i", *user, self.name, *shlex.split(shell)]


# Multiplexing makes the second exec cost 8 ms instead of 220; testinfra sets no ControlPath of its own.
SSH_DEFAULTS = [
    ("BatchMode", "yes"),
    ("ConnectTimeout", "10"),
    ("ServerAliveInterval", "5"),
    ("ServerAliveCountMax", "3"),
    ("StrictHostKeyChecking", "yes"),
    ("ControlMaster", "auto"),
    ("ControlPersist", "60"),
    ("LogLevel", "ERROR"),
]


def ssh_config_text(connections: list[Connection], control_dir: str) -> str:
    """One ssh_config for the whole deployment. The inventory's own options come first, and the first value wins."""
    blocks = []
    for connection in connections:
        if connection.kind != "ssh":
            continue
        given = {key.lower() for key, _ in connection.ssh_options}
        defaults = [(key, value) for key, value in SSH_DEFAULTS if key.lower() not in given]
        if "controlpath" not in given:
            defaults.append(("ControlPath", f"{control_dir}/%C"))
        lines = [f"  {key} {value}" for key, value in [*connection.ssh_options, *defaults]]
        blocks.append("\n".join([f"Host {connection.name}", *lines]))
    # ~/.ssh/config still applies to what is not said here (users' jump hosts, keys), as with plain ssh.
    return "\n\n".join([*blocks, "Match all\n  Include ~/.ssh/config"]) + "\n"


def ssh_args_to_options(text: str) -> list[tuple[str, str]]:
    """`ansible_ssh_common_args` as ssh_config keywords.

    Raises ValueError for an ssh argument that has no keyword here: it would otherwise be silently lost.
    """
    flags = {"-J": "ProxyJump", "-i": "IdentityFile", "-l": "User", "-p": "Port", "-F": "Include", "-b": "BindAddress"}
    switches = {"-A": ("ForwardAgent", "yes"), "-4": ("AddressFamily", "inet"), "-6": ("AddressFamily", "inet6"),
                "-C": ("Compression", "yes"), "-q": ("LogLevel", "QUIET")}  # fmt: skip
    options: list[tuple[str, str]] = []
    words = iter(shlex.split(text))
    for word in words:
        if word in switches:
            options.append(switches[word])
        elif word[:2] in ("-o", *flags):
            value = word[2:] or next(words, "")
            if not value:
                raise ValueError(f"'{word}' has no value")
            if word[:2] == "-o":
                key, _, value = value.replace("=", " ", 1).strip().partition(" ")
                options.append((key, value.strip()))
            else:
                options.append((flags[word[:2]], value))
        else:
            raise ValueError(f"ssh argument '{word}' is not understood; write it as '-o Keyword=value'")
    return options


def connection_from_vars(name: str, variables: dict[str, Any]) -> Connection:
    """Build the connection of inventory host `name` from its Ansible variables.

    Raises ValueError, worded for the operator, for a connection plugin or ssh argument that cannot be honoured.
    """
    plugin = str(variables.get("ansible_connection", "ssh"))
    kind = KINDS.get(plugin)
    if kind is None:
        raise ValueError(f"ansible_connection '{plugin}' is not supported; use one of {', '.join(sorted(set(KINDS.values())))}")
    become = _truth(variables.get("ansible_become", False))
    become_user = variables.get("ansible_become_user")
    if become and str(variables.get("ansible_become_method", "sudo")).rpartition(".")[2] != "sudo":
        raise ValueError(f"ansible_become_method '{variables['ansible_become_method']}' is not supported; use sudo")
    common: dict[str, Any] = {"become": become, "become_user": str(become_user) if become_user else None}
    user = variables.get("ansible_user") or variables.get("ansible_ssh_user")
    address = str(variables.get("ansible_host", name))
    if kind == "ssh":
        if variables.get("ansible_password") or variables.get("ansible_ssh_pass"):
            raise ValueError("password login is not supported; use a key (ansible_ssh_private_key_file) or an agent")
        return Connection(kind="ssh", name=name, ssh_options=_ssh_options(address, user, variables), **common)
    if kind == "local":
        return Connection(kind="local", name=name, **common)
    if kind == "kubectl":
        return Connection(
            kind="kubectl",
            name=str(variables.get("ansible_kubectl_pod", address)),
            namespace=variables.get("ansible_kubectl_namespace"),
            container=variables.get("ansible_kubectl_container"),
            context=variables.get("ansible_kubectl_context"),
            kubeconfig=variables.get("ansible_kubectl_kubeconfig"),
            **common,
        )
    return Connection(kind=kind, name=address, user=str(user) if user else None, **common)


def _ssh_options(address: str, user: Any, variables: dict[str, Any]) -> list[tuple[str, str]]:
    options = [("HostName", address)]
    port = variables.get("ansible_port") or variables.get("ansible_ssh_port")
    if port:
        options.append(("Port", str(int(port))))
    if user:
        options.append(("User", str(user)))
    key = variables.get("ansible_ssh_private_key_file") or variables.get("ansible_private_key_file")
    if key:
        options += [("IdentityFile", str(key)), ("IdentitiesOnly", "yes")]
    for variable in ("ansible_ssh_common_args", "ansible_ssh_extra_args"):
        options += ssh_args_to_options(str(variables.get(variable) or ""))
    if "ansible_host_key_checking" in variables and not _truth(variables["ansible_host_key_checking"]):
        options += [("StrictHostKeyChecking", "no")]
    return options


def _truth(value: Any) -> bool:
    return value if isinstance(value, bool) else str(value).strip().lower() in ("1", "true", "yes", "on", "y")
