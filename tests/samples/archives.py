"""Archives that attack whoever unpacks them: built here, byte by byte where tarfile would not write them."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from collections.abc import Callable

from tests.samples.upload_samples import NO_LOCK, tar_of

DESCRIBED = b'name = "small"\nclass = "small:Small"\n'
GOOD: dict[str, bytes] = {
    "environment.toml": DESCRIBED,
    "requirements.lock": NO_LOCK.encode(),
    "small.py": b"class Small:\n    pass\n",
}
BLOCK = 512


def header(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, **fields: str) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT)


def padded(content: bytes) -> bytes:
    return content + b"\0" * (-len(content) % BLOCK)


def pax(records: dict[str, str], kind: bytes = tarfile.XHDTYPE) -> bytes:
    """An extended header for the member behind it."""
    lines = b""
    for key, value in records.items():
        rest = f" {key}={value}\n".encode()
        length = len(rest) + 1
        while len(str(length)) + len(rest) != length:
            length = len(str(length)) + len(rest)
        lines += str(length).encode() + rest
    return header("pax", len(lines), kind) + padded(lines)


def patched(block: bytes, at: int, value: bytes) -> bytes:
    """A header with other bytes and its right check sum."""
    new = bytearray(block)
    new[at : at + len(value)] = value
    new[148:156] = b" " * 8
    new[148:156] = b"%06o\0 " % sum(new[:BLOCK])
    return bytes(new)


def good(**files: bytes) -> bytes:
    """A package that is fine but for these files; `__` for a dot."""
    named = {name.replace("__", "."): content for name, content in files.items()}
    return tar_of(*(GOOD | named).items())


def behind(*parts: bytes) -> bytes:
    """A good package with these bytes before its end."""
    whole = good()
    content = 3 * (BLOCK + BLOCK)
    return whole[:content] + b"".join(parts) + b"\0" * 1024


def link(kind: bytes, target: str) -> bytes:
    return behind(header("link", 0, kind, linkname=target))


def zipped(name: str, content: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(name, content)
    return out.getvalue()


def dotted(count: int) -> bytes:
    return b".".join([b"a"] * count) + b" = 1\n"


PLAIN = header("x", 1) + padded(b"x")
TAR_IS_WRONG = "is not a tar file"
NO_NAME = "no name of a file inside"
TOO_MUCH = "is too large"
DEVICE = "a link or a device"
NOT_READ = "cannot be read"

ARCHIVES: dict[str, tuple[Callable[[], bytes], str]] = {
    # names
    "path_climbs": (lambda: behind(header("../x")), NO_NAME),
    "path_climbs_in_the_middle": (lambda: behind(header("a/../../x")), NO_NAME),
    "path_is_absolute": (lambda: behind(header("/etc/x")), NO_NAME),
    "path_has_backslashes": (lambda: behind(header("..\\x")), NO_NAME),
    "path_has_a_newline": (lambda: behind(header("a\nb")), NO_NAME),
    "path_is_long": (lambda: behind(header("x" * 300)), NO_NAME),
    "path_is_a_megabyte": (lambda: behind(header("x/" * (1 << 19))), NO_NAME),
    "path_part_is_long_in_bytes": (lambda: behind(header("\N{SNOWMAN}" * 100)), "more than 255 bytes"),
    "path_of_a_file_is_empty": (lambda: behind(header(".")), NO_NAME),
    "path_climbs_by_pax": (lambda: behind(pax({"path": "../../x"}), PLAIN), NO_NAME),
    "path_is_absolute_by_pax": (lambda: behind(pax({"path": "/etc/x"}), PLAIN), NO_NAME),
    "path_has_nul_by_pax": (lambda: behind(pax({"path": "a\0b"}), PLAIN), NO_NAME),
    "path_is_no_utf8": (lambda: behind(patched(header("x"), 0, b"\xff\xfe")), NO_NAME),
    # kinds
    "symlink_out": (lambda: link(tarfile.SYMTYPE, "/etc/passwd"), DEVICE),
    "symlink_and_a_file_through_it": (
        lambda: behind(header("d", 0, tarfile.SYMTYPE, linkname="/tmp"), header("d/x", 1), padded(b"x")),
        DEVICE,
    ),
    "hard_link_out": (lambda: link(tarfile.LNKTYPE, "/etc/passwd"), DEVICE),
    "hard_link_to_a_member": (lambda: link(tarfile.LNKTYPE, "small.py"), DEVICE),
    "character_device": (lambda: behind(header("x", 0, tarfile.CHRTYPE)), DEVICE),
    "block_device": (lambda: behind(header("x", 0, tarfile.BLKTYPE)), DEVICE),
    "fifo": (lambda: behind(header("x", 0, tarfile.FIFOTYPE)), DEVICE),
    "sparse_of_old_gnu": (lambda: behind(header("x", 0, tarfile.GNUTYPE_SPARSE)), "sparse"),
    "sparse_by_pax": (lambda: behind(pax({"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}), PLAIN), TAR_IS_WRONG),
    "sparse_by_pax_that_is_huge": (
        lambda: behind(pax({"GNU.sparse.map": "0,1", "GNU.sparse.size": str(1 << 60)}), PLAIN),
        "sparse",
    ),
    # how many, how large
    "files_without_end": (lambda: behind(*(header(str(n)) for n in range(2001))), TOO_MUCH),
    "directories_without_end": (lambda: behind(*(header(f"{n}/", 0, tarfile.DIRTYPE) for n in range(4000))), TOO_MUCH),
    "directories_by_deep_paths": (lambda: behind(*(header(f"{n}/" + "d/" * 100 + "x") for n in range(50))), "2000 dir"),
    "size_is_a_terabyte": (
        lambda: behind(patched(header("x"), 124, b"\x80" + (1 << 40).to_bytes(11, "big"))),
        TOO_MUCH,
    ),
    "size_is_negative": (lambda: behind(patched(header("x"), 124, b"\xff" * 12)), "tar file|negative"),
    "size_is_a_terabyte_by_pax": (lambda: behind(pax({"size": str(1 << 40)}), PLAIN), TOO_MUCH),
    "size_is_negative_by_pax": (lambda: behind(pax({"size": "-1"}), PLAIN), "tar file|negative"),
    "size_is_no_number_by_pax": (lambda: behind(pax({"size": "many"}), PLAIN), ""),
    "member_twice": (lambda: behind(header("small.py")), "twice"),
    "file_that_is_a_directory_too": (lambda: behind(header("small.py/x")), "twice"),
    # headers
    "pax_header_of_a_terabyte": (lambda: behind(header("p", 1 << 33, tarfile.XHDTYPE)), ""),
    "pax_headers_on_headers": (lambda: behind(*[pax({"a": "b"})] * 3000, PLAIN), ""),
    "pax_length_is_wrong": (lambda: behind(header("p", 20, tarfile.XHDTYPE), padded(b"9999999999 path=x\n")), ""),
    "pax_length_is_nought": (lambda: behind(header("p", 20, tarfile.XHDTYPE), padded(b"0 path=xxxxxxxxxx\n")), ""),
    "pax_with_many_records": (lambda: behind(pax({f"k{n}": "v" for n in range(50000)}), PLAIN), ""),
    "long_names_on_long_names": (
        lambda: behind(*[header("n", 2, tarfile.GNUTYPE_LONGNAME), padded(b"x\0")] * 3000, PLAIN),
        "",
    ),
    "check_sum_is_wrong": (lambda: b"x" * BLOCK + good(), TAR_IS_WRONG),
    "cut_in_a_file": (lambda: good(big__txt=b"x" * 5000)[: 8 * BLOCK], TAR_IS_WRONG),
    "nothing": (lambda: b"", TAR_IS_WRONG),
    "gzip_bomb": (lambda: gzip.compress(b"\0" * (1 << 24)), TAR_IS_WRONG),
    "zip_bomb": (lambda: zipped("x", b"\0" * (1 << 24)), TAR_IS_WRONG),
    # what is inside
    "toml_of_15000_dots": (lambda: good(pyproject__toml=dotted(15000)), "more than 16 parts"),
    "toml_of_30000_dots_in_the_description": (lambda: good(environment__toml=dotted(30000)), "more than 16 parts"),
    "toml_table_of_15000_dots": (lambda: good(pyproject__toml=b"[" + b".".join([b"a"] * 15000) + b"]\n"), "16 parts"),
    "toml_key_of_escapes": (
        lambda: good(pyproject__toml=b".".join([b'"\\t"'] * 9000) + b" = 1\n"),
        "more than 16 parts",
    ),
    "toml_key_of_quotes_and_space": (lambda: good(pyproject__toml=b" \t. ".join([b"''"] * 6000) + b"=1\n"), "16 parts"),
    "toml_of_brackets": (lambda: good(pyproject__toml=b"a = " + b"[" * 20000), "nested too deeply"),
    "toml_of_inline_tables": (lambda: good(pyproject__toml=b"a = " + b"{a=" * 15000), "nested too deeply"),
    "toml_of_a_megabyte": (lambda: good(pyproject__toml=b"# " + b"x" * 900_000), "at most 65536"),
    "toml_number_of_50000_digits": (lambda: good(environment__toml=b"name = " + b"9" * 50000), NOT_READ),
    "toml_hexadecimal_number": (lambda: good(environment__toml=DESCRIBED + b"python = 0x" + b"f" * 50000), ""),
    "toml_with_other_types": (lambda: good(pyproject__toml=b"project = 3\ntool = [1]\n"), ""),
    "toml_that_is_binary": (lambda: good(environment__toml=bytes(range(128, 256))), NOT_READ),
    "uv_lock_of_dots": (lambda: good(uv__lock=dotted(30000)), "there are both"),
    "uv_lock_with_other_types": (
        lambda: good(environment__toml=DESCRIBED + b'lock = "uv.lock"\n', uv__lock=b"package = [1, 2]\n"),
        "not of the form",
    ),
}
"""By name: how it is built, and words of why it is refused; without words it may be a package after all."""


def costly() -> bytes:
    """Gets past every bound that is looked at before parsing: gigabytes of memory."""
    key = b".".join([b'"' + b"a" * 120 + b'"'] * 20000)
    return good(environment__toml=DESCRIBED + b'lock = "uv.lock"\n', uv__lock=key + b" = 1\n")
