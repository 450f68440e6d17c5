/* SPDX-License-Identifier: Apache-2.0
 * Torch tensors of memory that DLPack describes. */
#ifndef WSYNC_PYTHON_TENSOR_IMPORT_H
#define WSYNC_PYTHON_TENSOR_IMPORT_H

#include "python/module.h"

#include "core/layout/layout.h"
#include "dlpack/dlpack.h"

/* How tensors are made: by DLPack's C exchange API, which torch has from 2.10 on, or by
 * torch.utils.dlpack of earlier versions. */
typedef struct wsync_py_importer {
    const DLPackExchangeAPI *api; /* NULL: by `torch` */
    PyObject *torch;              /* owned */
} wsync_py_importer_t;

/* Finds how tensors of a type, or of a tensor's type, are made: -1 with UnsupportedError
 * where they cannot be. */
int wsync_py_importer_init(wsync_py_importer_t *importer, ModuleState *state,
                           PyObject *like);
void wsync_py_importer_fini(wsync_py_importer_t *importer);

/* A tensor of `nbytes` of contiguous memory, which has the dtype and shape of `tensor`.  It
 * owns `managed` from here on, also when it fails: NULL with an exception. */
PyObject *wsync_py_import(const wsync_py_importer_t *importer,
                          DLManagedTensorVersioned *managed, const wsync_tensor_t *tensor,
                          uint64_t nbytes);

#endif
