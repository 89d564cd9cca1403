"""GGUF files with one tensor in another form."""

import pytest

gguf = pytest.importorskip("gguf")


def copied_with(path, new, name: str, raw, kind: str) -> None:
    """The file at `path` with tensor `name` replaced by blocks of `kind`."""
    writer = copy_without(path, name, new)
    writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    finish(writer)


def copy_without(path, left_out: str, new) -> gguf.GGUFWriter:
    """A writer that holds everything of `path` but one tensor."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(new, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(
                name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
            )
    for t in reader.tensors:
        if t.name != left_out:
            writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    return writer


def finish(writer) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
