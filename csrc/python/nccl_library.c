/* SPDX-License-Identifier: Apache-2.0 */
#include "comm/nccl_library.h"
#include "python/convert.h"

static PyObject *nccl_library(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"libraries", NULL};
    const wsync_nccl_library_t *library = NULL;
    ModuleState *state = wsync_py_state(module);
    PyObject *libraries = NULL;
    wsync_py_items_t paths;
    wsync_error_t err = {0};
    wsync_status_t status;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:nccl_library", keywords,
                                     &libraries) ||
        wsync_py_items_init_texts(&paths, state, libraries, "libraries") < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_nccl_library((const char *const *)paths.items, paths.count, &library,
                                    &err);
    Py_END_ALLOW_THREADS
    wsync_py_items_fini(&paths);
    if (status != WSYNC_OK) {
        return wsync_py_raise(state, &err);
    }
    return Py_BuildValue("(iN)", library->version,
                         PyUnicode_DecodeFSDefault(library->path));
}

PyMethodDef wsync_py_functions_nccl[] = {
    {"nccl_library", WSYNC_PY_KEYWORDS(nccl_library), "nccl_library(libraries=())\n--\n\n"},
    {NULL, NULL, 0, NULL},
};
