"""etcd, API server, controller manager, scheduler, CoreDNS and the kube-proxy that serves the host."""

from dataclasses import dataclass
from pathlib import Path

from . import processes
from .api import Api
from .build import Programs, Release
from .layout import API_PORT, CONTROL, CONTROL_ADDRESS, DNS_DOMAIN, POD_NETWORK, SERVICE_NETWORK, Layout

ETCD = "http://127.0.0.1:2379"
ISSUER = f"https://kubernetes.default.svc.{DNS_DOMAIN}"
PARTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "coredns", "kube-proxy")


@dataclass(frozen=True)
class ControlPlane:
    """Starts the components that run on no node."""

    layout: Layout
    programs: Programs
    release: Release
    grace: float | None
    """Seconds without a heartbeat after which a node counts as lost; None: the default of Kubernetes (50)."""

    def start(self, part: str, *flags: str) -> None:
        processes.start(
            f"control/{part}",
            [self.programs.path(part), *flags],
            state=self.layout.state,
            log=self.layout.log / f"{part}.log",
            namespace=CONTROL,
        )

    def pki(self, name: str) -> str:
        return str(self.layout.pki / name)

    def start_store(self) -> None:
        """Start etcd and the API server, which retries until etcd answers."""
        self.start("etcd", *etcd_flags(self.layout.state / "etcd", ETCD, "http://127.0.0.1:2380"))
        flags = api_server_flags(self.layout.pki, ETCD, CONTROL_ADDRESS, API_PORT, self.release)
        self.start("kube-apiserver", *flags)

    def start_controllers(self) -> None:
        """Start controller manager and scheduler, without leader election: each has only one replica."""
        self.start(
            "kube-controller-manager",
            *self.identity("controller-manager"),
            f"--cluster-signing-cert-file={self.pki('ca.crt')}",
            f"--cluster-signing-key-file={self.pki('ca.key')}",
            f"--root-ca-file={self.pki('ca.crt')}",
            f"--service-account-private-key-file={self.pki('sa.key')}",
            "--use-service-account-credentials=true",
            "--allocate-node-cidrs=false",
            *([] if self.grace is None else [f"--node-monitor-grace-period={self.grace:g}s"]),
            # With the default of 20 requests a second, the controller manager takes 5 s to start.
            "--kube-api-qps=200",
            "--kube-api-burst=400",
            # The default is 15 s.
            "--horizontal-pod-autoscaler-sync-period=3s",
        )
        self.start("kube-scheduler", *self.identity("scheduler"))

    def identity(self, name: str) -> list[str]:
        kubeconfig = self.pki(f"{name}.kubeconfig")
        flags = [f"--{kind}kubeconfig={kubeconfig}" for kind in ("", "authentication-", "authorization-")]
        common = ["--leader-elect=false", "--profiling=false", "--bind-address=127.0.0.1"]
        return [*flags, *common, *self.release.gate_flags]

    def start_network(self, corefile: Path) -> None:
        """Start CoreDNS, and kube-proxy for the host and the API server."""
        self.start("coredns", "-conf", str(corefile))
        # kube-proxy needs the name of an existing node; only NodePorts, which are unused, depend on which.
        self.start("kube-proxy", *proxy_flags(self.layout, self.layout.node(1).name, CONTROL_ADDRESS))


def etcd_flags(data: Path, client: str, peer: str) -> list[str]:
    """Return etcd's flags, with its two URLs."""
    return [
        f"--data-dir={data}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        # A crash of the machine ends the cluster anyway, so its data need not reach the disk.
        "--unsafe-no-fsync=true",
        "--log-level=warn",
    ]


def api_server_flags(pki: Path, etcd: str, address: str, port: int, release: Release) -> list[str]:
    """Return the API server's flags: the folder of its certificates, etcd's URL, and where it listens."""
    return [
        *release.gate_flags,
        *release.api_flags,
        f"--etcd-servers={etcd}",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        f"--bind-address={address}",
        f"--advertise-address={address}",
        f"--secure-port={port}",
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--service-account-key-file={pki / 'sa.pub'}",
        f"--service-account-signing-key-file={pki / 'sa.key'}",
        f"--service-account-issuer={ISSUER}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--kubelet-certificate-authority={pki / 'ca.crt'}",
        f"--kubelet-client-certificate={pki / 'apiserver-kubelet.crt'}",
        f"--kubelet-client-key={pki / 'apiserver-kubelet.key'}",
        # DNS does not resolve node names: logs and exec must use addresses.
        "--kubelet-preferred-address-types=InternalIP",
        f"--requestheader-client-ca-file={pki / 'ca.crt'}",
        "--requestheader-allowed-names=front-proxy",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        f"--proxy-client-cert-file={pki / 'front-proxy.crt'}",
        f"--proxy-client-key-file={pki / 'front-proxy.key'}",
        "--enable-aggregator-routing=true",
        "--profiling=false",
    ]


def proxy_flags(layout: Layout, host: str, address: str) -> list[str]:
    """Return kube-proxy's flags, for a node or for the control plane's namespace."""
    return [
        f"--kubeconfig={layout.pki / 'kube-proxy.kubeconfig'}",
        f"--hostname-override={host}",
        f"--bind-address={address}",
        f"--cluster-cidr={POD_NETWORK}",
        "--proxy-mode=iptables",
        "--iptables-min-sync-period=100ms",
        "--iptables-sync-period=10m",
        # The size of the connection table is machine-wide: leave it alone.
        "--conntrack-max-per-core=0",
        "--nodeport-addresses=primary",
        "--healthz-bind-address=127.0.0.1:10256",
        "--metrics-bind-address=127.0.0.1:10249",
    ]


def ready(api: Api) -> str | None:
    """Return None when the API server serves, else its response."""
    return api.problem("/readyz")
