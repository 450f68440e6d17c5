/* SPDX-License-Identifier: Apache-2.0
 * Plan as other files of csrc/python see it.  Recognise it by ModuleState.type_Plan. */
#ifndef WSYNC_PYTHON_PLAN_H
#define WSYNC_PYTHON_PLAN_H

#include "python/module.h"

#include "core/plan/plan.h"

/* Immutable. */
typedef struct PlanObject {
    PyObject_HEAD
    wsync_plan_t *plan; /* owned */
} PlanObject;

#endif
