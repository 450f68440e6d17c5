/* SPDX-License-Identifier: Apache-2.0
 * Quantiser, as other files of csrc/python use it.  Its type is
 * ModuleState.type_Quantiser. */
#ifndef WSYNC_PYTHON_QUANTISER_H
#define WSYNC_PYTHON_QUANTISER_H

#include "python/module.h"

#include "core/quantise/quantiser.h"

/* Immutable. */
typedef struct QuantiserObject {
    PyObject_HEAD
    wsync_quantiser_t *quantiser; /* owned */
    PyObject *layout;             /* owned */
} QuantiserObject;

#endif
