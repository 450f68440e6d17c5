/* SPDX-License-Identifier: Apache-2.0
 * Layout, as other files of csrc/python use it.  Its type is ModuleState.type_Layout. */
#ifndef WSYNC_PYTHON_LAYOUT_H
#define WSYNC_PYTHON_LAYOUT_H

#include "python/module.h"

#include "core/layout/layout.h"

/* Immutable. */
typedef struct LayoutObject {
    PyObject_HEAD
    wsync_layout_t *layout; /* owned */
} LayoutObject;

/* Wraps a layout, which it takes over also on failure. */
PyObject *wsync_py_layout_new(ModuleState *state, wsync_layout_t *layout);

#endif
