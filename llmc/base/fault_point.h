/*
fault_point.h: the places at which a test program causes faults (tests/planned_faults.h).

In the product fault_point returns false and compiles to nothing. A test program defines PLANNED_FAULTS before it
includes the trainer, and then the function itself.

  place             called                                     data                     number      true
  FAULT_STAGE       when a rank enters a stage                 NULL                     the stage
  FAULT_GRADIENT    at the end of embedding_backward (C)       dweight                  elements
  FAULT_UPDATE      at the end of adamw_update (C)             params                   elements
  FAULT_MOMENT      at the end of adamw_update (C)             m                        elements
  FAULT_WRITE       after each write of tensors to a file      the path                 bytes left
  FAULT_REMOVE      before a directory is removed              the path                 0           removal fails
  FAULT_COPY        before the copy of a background checkpoint is allocated
                                                               NULL                     bytes       allocation fails
  FAULT_RECEIVE     before parameters or gradients of other ranks are received (MPI)
                                                               NULL                     elements
  FAULT_COMPLETE    when an operation of the ranks has begun (MPI)
                                                               NULL                     0           wait until it ends
  FAULT_SIGNAL      before the trainer reads stop_signal       NULL                     0           a signal arrives
*/
#pragma once
#include <stdbool.h>
#include <stddef.h>

typedef enum {
    FAULT_STAGE,
    FAULT_GRADIENT,
    FAULT_UPDATE,
    FAULT_MOMENT,
    FAULT_WRITE,
    FAULT_REMOVE,
    FAULT_COPY,
    FAULT_RECEIVE,
    FAULT_COMPLETE,
    FAULT_SIGNAL
} FaultPlace;

#ifdef PLANNED_FAULTS
static bool fault_point(FaultPlace place, void *data, size_t number);
#else
static inline bool fault_point(FaultPlace place, void *data, size_t number) {
    (void)place, (void)data, (void)number;
    return false;
}
#endif
