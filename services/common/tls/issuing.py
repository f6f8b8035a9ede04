"""A CA of one installation, and the certificates that it gives to its components."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.common.tls.certificate import Identity

_CLOCKS_DIFFER = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its key, both PEM."""

    certificate: bytes
    key: bytes

    @property
    def hosts(self) -> frozenset[str]:
        """The DNS names of the certificate."""
        names = self.leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return frozenset(names.get_values_for_type(x509.DNSName))

    @property
    def leaf(self) -> x509.Certificate:
        """The certificate, read."""
        return x509.load_pem_x509_certificate(self.certificate)


@dataclass(frozen=True, slots=True)
class Authority:
    """A CA: its own certificate and key."""

    own: Issued

    @staticmethod
    def new(life: timedelta, now: float | None = None) -> Authority:
        """A CA whose life begins `now`, in seconds since the epoch.

        It has a name of its own: a peer that trusts an old and a new CA finds the right one by its name.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"ryzanstein CA {secrets.token_hex(8)}")])
        builder = _builder(name, name, key, life, now)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        return Authority(_signed(builder, key, key))

    def issue(
        self, identity: Identity, life: timedelta, now: float | None = None, *, hosts: Sequence[str] = ()
    ) -> Issued:
        """A certificate for both sides of TLS; `hosts`: DNS names besides the identity's own."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.component)])
        names = [x509.UniformResourceIdentifier(identity.uri), *map(x509.DNSName, (identity.host, *hosts))]
        both_sides = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = _builder(name, self.own.leaf.subject, key, life, now)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(digital_signature=True), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(both_sides), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        signer = load_pem_private_key(self.own.key, None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
        builder = builder.add_extension(issuer, critical=False)
        return _signed(builder, key, signer)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, life: timedelta, now: float | None
) -> x509.CertificateBuilder:
    begin = datetime.now(UTC) if now is None else datetime.fromtimestamp(now, UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin - _CLOCKS_DIFFER + min(life, timedelta()))
        .not_valid_after(begin + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _signed(
    builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey
) -> Issued:
    certificate = builder.sign(signer, hashes.SHA256())
    return Issued(
        certificate.public_bytes(Encoding.PEM), key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
