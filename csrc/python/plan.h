/* SPDX-License-Identifier: Apache-2.0
 * Plan, as other files of csrc/python use it.  Its type is ModuleState.type_Plan. */
#ifndef WSYNC_PYTHON_PLAN_H
#define WSYNC_PYTHON_PLAN_H

#include "python/module.h"

#include "core/plan/plan.h"

/* Immutable. */
typedef struct PlanObject {
    PyObject_HEAD
    wsync_plan_t *plan; /* owned */
    uint64_t id;        /* of its lists of copies */
} PlanObject;

#endif
