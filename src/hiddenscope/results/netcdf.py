"""A reader of netCDF-4 files that trusts nothing in them.

A netCDF-4 file is an HDF5 file, and an HDF5 variable can be much more than numbers:
values in another file or in a pipe, views of other variables, links to other files,
compressed zeros, a terabyte of one fill value, code in a filter plugin, one string that
is referenced a million times. `Result.save` writes none of that. The layout of a
variable is checked before any of its values is read; xarray and h5netcdf would read
everything.
"""

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import h5py
    import numpy as np

SIGNATURE = b"\x89HDF\r\n\x1a\n"
# HDF5 stores a string as its length in 4 bytes, the address of its heap in 8 bytes and
# its index in that heap in 4.
STRING_BYTES = 16


class NetcdfFile:
    """A netCDF-4 file in memory, whose variables are read one by one in a `with`.

    >>> import xarray
    >>> content = io.BytesIO()
    >>> norms = xarray.Dataset({"norm": ("site", [1.0, 2.5])})
    >>> norms.to_netcdf(content, engine="h5netcdf")
    >>> with NetcdfFile(content.getvalue()) as file:
    ...     file.read("norm")
    array([1. , 2.5])
    """

    def __init__(self, content: bytes) -> None:
        import h5py

        if not content.startswith(SIGNATURE):
            raise ValueError("it is no HDF5 file")
        self._content = content
        self._file = h5py.File(io.BytesIO(content), "r")

    def __enter__(self) -> "NetcdfFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def read(self, name: str) -> "np.ndarray[Any, Any]":
        """Return the values of a variable; text comes as an array of objects.

        Raises ValueError if the variable is anything but plain numbers or text in this
        file, and LookupError if there is none of this name.
        """
        import h5py
        import numpy as np

        dataset = self._dataset(name)
        _check_layout(dataset, name)
        if h5py.check_string_dtype(dataset.dtype) is not None:
            self._check_strings(dataset, name)
            return np.array(dataset.asstr()[()], dtype=object)
        if dataset.dtype.kind not in "biuf":
            raise ValueError(f"variable {name!r} holds neither numbers nor text")
        self._check_storage(dataset, name, dataset.dtype.itemsize)
        return np.asarray(dataset[()])

    def _dataset(self, name: str) -> "h5py.Dataset":
        import h5py

        link = None
        # A name with a slash is a path, and any step of a path may be a link.
        if "/" not in name:
            link = self._file.get(name, getlink=True)
        if link is None:
            raise LookupError(f"there is no variable {name!r}")
        if not isinstance(link, h5py.HardLink):
            raise ValueError(f"variable {name!r} is a link")
        dataset = self._file[name]
        if not isinstance(dataset, h5py.Dataset):
            raise ValueError(f"{name!r} is no variable")
        return dataset

    def _check_strings(self, dataset: "h5py.Dataset", name: str) -> None:
        """Refuse strings whose total length exceeds the file.

        One of them must then be referenced many times, and would fill the memory.
        """
        import h5py
        import numpy as np

        if h5py.check_string_dtype(dataset.dtype).length is not None:
            raise ValueError(f"variable {name!r} holds strings of a fixed length")
        if self._file.id.get_create_plist().get_sizes() != (8, 8):
            raise ValueError("its addresses do not have 8 bytes")
        self._check_storage(dataset, name, STRING_BYTES)
        if dataset.size == 0:
            return
        words = np.frombuffer(
            self._content, "<u4", 4 * dataset.size, dataset.id.get_offset()
        )
        lengths = words[::4]
        if int(lengths.sum(dtype=np.uint64)) > len(self._content):
            raise ValueError(
                f"the strings of variable {name!r} are longer than the file"
            )

    def _check_storage(
        self, dataset: "h5py.Dataset", name: str, item_bytes: int
    ) -> None:
        """Refuse a variable whose values are not all stored in the file."""
        stored = dataset.id.get_storage_size()
        needed = dataset.size * item_bytes
        if stored != needed or needed > len(self._content):
            raise ValueError(
                f"variable {name!r} has {dataset.size:,} values, and the file holds"
                f" {stored:,} bytes of it"
            )


def _check_layout(dataset: "h5py.Dataset", name: str) -> None:
    """Refuse a variable that is not one uncompressed piece of this file."""
    import h5py

    properties = dataset.id.get_create_plist()
    if properties.get_external_count():
        raise ValueError(f"the values of variable {name!r} are in another file")
    if properties.get_layout() == h5py.h5d.VIRTUAL:
        raise ValueError(f"variable {name!r} is a view of others")
    if properties.get_nfilters():
        raise ValueError(f"variable {name!r} is compressed")
    # HDF5 gives a variable without values a chunked layout.
    if properties.get_layout() != h5py.h5d.CONTIGUOUS and dataset.size:
        raise ValueError(f"variable {name!r} is not in one piece")
