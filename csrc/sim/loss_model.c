/* Loss over progress, and gradient noise over loss.
 *
 * Progress counts steps of an endless batch without quantising: a real step makes 1 / S
 * of one. The loss follows a power law with a floor; the noise scale that of Kaplan et
 * al. (arXiv 2001.08361), so it grows as training goes on. */
#include "experiment.h"

#include <math.h>

double
loss_at(const dcp_loss_model_t *model, double progress)
{
    return model->floor
           + (model->start - model->floor)
                 * pow(1.0 + progress / model->knee, -model->power);
}

double
progress_at(const dcp_loss_model_t *model, double target)
{
    double share = (model->start - model->floor) / (target - model->floor);
    return model->knee * (pow(share, 1.0 / model->power) - 1.0);
}

double
noise_at(const dcp_loss_model_t *model, double loss)
{
    return model->noise_scale / pow(loss, 1.0 / model->noise_power);
}
