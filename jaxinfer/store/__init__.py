"""Models as jaxinfer keeps them in memory, on disk: packed, kernel-ready arrays and all that belongs to them.

    PATH/jaxinfer.json             what it is: configuration, kinds and shapes of weights, plan, quality, versions,
                                   checksums of all of these files and of itself
    PATH/weights/top/              an Orbax checkpoint of embedding, last norm and head
    PATH/weights/layer_00000/      one of each layer
    PATH/original/                 tokenizer, chat template and JSON files of the model, as they were

`jaxinfer.load` opens one like any checkpoint. The arrays are zarr version 2 as Orbax writes it, one uncompressed chunk
an array, so that a chunk's file is the array's bytes. A store is data: nothing in it is run or imported, and every name
under which an array is looked for comes from here, not from the store.
"""
