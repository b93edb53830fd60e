"""Throw-away certificates and keys for one run on this machine. A real federation gets its own from its own CA."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

DAY = datetime.timedelta(days=1)


def make_certificates(folder: Path) -> None:
    """A CA (ca.pem) and a server certificate for 127.0.0.1 signed by it (server.pem, server.key)."""
    ca_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    ca, server = _name("FedUP example CA"), _name("127.0.0.1")
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")])
    authority = _unsigned(ca, ca, ca_key).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    served = _unsigned(server, ca, server_key).add_extension(here, critical=False)
    for name, unsigned in (("ca", authority), ("server", served)):
        signed = unsigned.sign(ca_key, hashes.SHA384())
        (folder / f"{name}.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    _write_private(folder / "server.key", server_key, serialization.PrivateFormat.PKCS8)


def make_node_key(folder: Path, name: str) -> tuple[Path, Path]:
    """A SuperNode's private and public key, as OpenSSH writes them."""
    key, private, public = ec.generate_private_key(ec.SECP384R1()), folder / name, folder / f"{name}.pub"
    _write_private(private, key, serialization.PrivateFormat.OpenSSH)
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )
    return private, public


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _unsigned(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
    )


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> None:
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
