"""Pictures in files, and tables of them in the layout of the Hugging Face hub."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def encoded(pixels: np.ndarray | Image.Image, form: str = "PNG") -> bytes:
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    buffer = io.BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()


def images_table(images: list[bytes | np.ndarray | None], label: list | None = None, **columns: list) -> pa.Table:
    data = [encoded(image) if isinstance(image, np.ndarray) else image for image in images]
    content = {"image": [{"bytes": one, "path": f"{row}.png"} for row, one in enumerate(data)]}
    return pa.table(content | ({} if label is None else {"label": label}) | columns)


def parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()
