"""A store in the formats of other programs, written some rows at a time.

formats     which formats there are, by name and by suffix
target      a file or folder that appears whole or not at all
parquet     a Parquet file, and one that Embedding Atlas opens
zarr_group  a Zarr group, version 3
dataset     a dataset of Hugging Face's datasets
"""

from hiddenscope.store.export.formats import ExportFormat, export_rows

__all__ = ["ExportFormat", "export_rows"]
